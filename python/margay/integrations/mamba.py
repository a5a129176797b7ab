from margay.drop_ins.mamba_ssm import __doc__, install_as_mamba_ssm, register, unregister  # noqa: F401
