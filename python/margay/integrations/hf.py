from margay.drop_ins.hf import __doc__, attention, attention_mask, register  # noqa: F401
