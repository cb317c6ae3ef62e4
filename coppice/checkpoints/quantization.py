"""Weight-only quantisation to 8 bits, and the model that it serves.

A row of a linear layer's weights is q * s, q whole numbers in [-127, 127] and s the smallest power of two for which
they reach. Products of both are exact in bfloat16 and in single precision, so that the dequantised model has the same
weights in either.
"""

from __future__ import annotations

from typing import Any

INT8 = "int8"
_LARGEST = 127


def row_scales(weights: Any) -> Any:
    """Scales [out] of a tensor of weights [out, in]; those of dequantised weights are the same."""
    mantissas, exponents = (weights.abs().amax(1) / _LARGEST).frexp()
    # A mantissa is in [0.5, 1); 0 is that of rows of zeros.
    exponents = exponents - (mantissas == 0.5).to(exponents.dtype)
    return mantissas.new_ones(len(mantissas)).ldexp(exponents)


def whole_numbers(weights: Any, scales: Any) -> Any:
    """Weights [out, in] over scales [out], rounded to the nearest whole numbers in [-127, 127]."""
    return (weights / scales[:, None]).round().clamp(-_LARGEST, _LARGEST)


def quantize_linears(model: Any) -> None:
    """Replace the weights of a torch model's linear layers by their dequantised ones, in place.

    A tied embedding is that of its output layer.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear":
            weights = module.weight.data
            scales = row_scales(weights.float())
            weights.copy_(whole_numbers(weights.float(), scales) * scales[:, None])
