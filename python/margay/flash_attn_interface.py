from margay.drop_ins.flash_attn3 import *  # noqa: F403
from margay.drop_ins.flash_attn3 import __doc__  # noqa: F401
