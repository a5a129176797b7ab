from margay.drop_ins.fla import __doc__, register, unregister  # noqa: F401
