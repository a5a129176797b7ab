"""What attention has beside a causal mask and a scale, as `_C` takes it. Apart from attention.py, which imports little:
`import margay` stays fast."""

from collections import namedtuple

Features = namedtuple("Features",
                      "left right softcap dropout_p seed sink alibi_slopes cu_seqlens_q cu_seqlens_k max_seqlen_q "
                      "max_seqlen_k")
