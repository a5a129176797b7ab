from margay.drop_ins.flashfftconv import *  # noqa: F403
from margay.drop_ins.flashfftconv import __doc__  # noqa: F401
