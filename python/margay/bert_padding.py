from margay.drop_ins.bert_padding import *  # noqa: F403
from margay.drop_ins.bert_padding import __doc__  # noqa: F401
