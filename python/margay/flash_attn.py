from margay.drop_ins.flash_attn2 import *  # noqa: F403
from margay.drop_ins.flash_attn2 import __doc__, __version__  # noqa: F401
