from margay.drop_ins.fla import __doc__, register  # noqa: F401
