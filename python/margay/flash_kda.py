from margay.drop_ins.flash_kda import *  # noqa: F403
from margay.drop_ins.flash_kda import __doc__  # noqa: F401
