"""Model shapes for tests of physics: published ones, and small ones that hypothesis draws."""

from hypothesis import strategies as st

from agent.analysis.physics.coefficients import Coefficients, LayerAttention

WINDOWS = st.none() | st.integers(1, 5000)
LENGTHS = st.integers(0, 20_000)


@st.composite
def attentions(draw: st.DrawFn) -> LayerAttention:
    """Attention of some layers, expanded or latent, with or without a window."""
    heads = draw(st.integers(1, 16))
    return LayerAttention(
        layers=draw(st.integers(1, 40)),
        window=draw(WINDOWS),
        kv_heads=heads,
        token_bytes=heads * draw(st.integers(1, 256)),
        prefill_flops_per_pair=draw(st.integers(1, 10_000)),
        decode_flops_per_pair=draw(st.integers(1, 10_000)),
    )


MODELS = st.builds(
    Coefficients,
    linear_parameters=st.integers(1, 10**12),
    head_parameters=st.integers(1, 10**10),
    attentions=st.lists(attentions(), min_size=1, max_size=3).map(tuple),
)
