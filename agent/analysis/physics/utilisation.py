"""How much of a GPU's best was used: MFU and MBU. Prefill and decode are asked for apart."""


def flops_utilisation(
    flops: float, seconds: float, *, gpus: int, peak_flops_per_s: float
) -> float | None:
    """MFU: the model's FLOPs over what the GPUs could do at their dense peak in that time.

    None where no time passed. A ratio; more than 1 means a wrong peak or a wrong model.
    """
    return flops / (seconds * gpus * peak_flops_per_s) if seconds > 0 else None


def bandwidth_utilisation(
    bytes_moved: float, seconds: float, *, gpus: int, bandwidth_bytes_per_s: float
) -> float | None:
    """MBU: the bytes that had to move over what the GPUs' memory could deliver in that time.

    None where no time passed. A ratio.
    """
    return bytes_moved / (seconds * gpus * bandwidth_bytes_per_s) if seconds > 0 else None


def single_stream_bytes_per_s(
    parameters: float, bits_per_weight: float, tokens_per_s: float
) -> float:
    """Bytes per second that one request decoding alone needs: all weights for each token."""
    return parameters * bits_per_weight / 8 * tokens_per_s
