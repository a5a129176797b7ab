from margay.drop_ins.sdpa import __doc__, enable_sdpa  # noqa: F401
