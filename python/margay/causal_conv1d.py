"""causal-conv1d's functions, under the name that is also that of Margay's function: `margay.causal_conv1d(...)` calls
it, `from margay.causal_conv1d import causal_conv1d_fn, causal_conv1d_update` has the package's."""
import sys

from margay.drop_ins import causal_conv1d as _drop_in
from margay.families.causal_conv1d.causal_conv1d import causal_conv1d

for _name in _drop_in.__all__:
    setattr(causal_conv1d, _name, getattr(_drop_in, _name))
sys.modules[__name__] = causal_conv1d      # an import binds this name in the package, where it must stay the function
