from margay.drop_ins.flashinfer import *  # noqa: F403
from margay.drop_ins.flashinfer import __doc__  # noqa: F401
