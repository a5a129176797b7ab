from margay.drop_ins.delta_models import __doc__, register, unregister  # noqa: F401
