"""Op kinds whose host kernels run on a device's arrays as they are.

The tests hold this list against what runs on arrays that refuse what CuPy refuses.
"""

from __future__ import annotations

# fmt: off
AS_THEY_ARE = frozenset({
    "abs", "abs_sum", "accumulate", "acos", "acosh", "adafactor_moments", "add", "add_scalar",
    "argmax", "argmin", "argsort", "asin", "asinh", "assign", "atan", "atan2", "atanh",
    "batch_norm", "bce_loss", "bce_loss_grad", "bce_with_logits", "bce_with_logits_grad",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "cast", "ceil", "clip",
    "collect_pieces", "concat", "conv1d", "conv1d_weight_grad", "conv2d", "conv2d_transpose",
    "conv2d_weight_grad", "conv3d", "conv3d_transpose", "conv3d_weight_grad", "copysign", "cos",
    "cosh", "count_nonzero", "cumprod", "cumsum", "decayed_sum_update", "diag_embed", "diagonal",
    "div", "div_scalar", "einsum", "elu", "elu_grad", "equal", "equal_scalar", "exp", "exp2",
    "expand_to", "expm1", "eye", "fill", "flip", "floor", "gelu", "gelu_grad",
    "gradient_sum_update", "greater", "greater_equal", "greater_equal_scalar", "greater_scalar",
    "group_norm", "group_norm_grad", "group_rows", "group_sums", "hardsigmoid", "hardsigmoid_grad",
    "hardswish", "hardswish_grad", "huber_loss", "huber_loss_grad", "hypot", "isfinite", "isinf",
    "isnan", "join_qkv", "kl_div", "kl_div_grad", "l1_loss", "l1_loss_grad", "layer_norm",
    "layer_norm_grad", "leaky_relu", "leaky_relu_grad", "learning_rate", "lerp", "less",
    "less_equal", "less_equal_scalar", "less_scalar", "log", "log10", "log1p", "log2", "logaddexp",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logsigmoid", "logsigmoid_grad",
    "masked", "max_pool1d", "max_pool1d_grad", "max_pool1d_pick", "max_pool2d", "max_pool2d_grad",
    "max_pool2d_pick", "max_pool3d", "max_pool3d_grad", "max_pool3d_pick", "maximum",
    "maximum_scalar", "minimum", "minimum_scalar", "mish", "mish_grad", "moving_average_update",
    "mse_loss", "mse_loss_grad", "mul", "mul_scalar", "neg", "not_equal", "not_equal_scalar", "pad",
    "place_gradient", "pow", "pow_scalar", "prod", "reciprocal", "redistribute", "relu",
    "relu_grad", "reshape", "rms_norm", "rms_norm_grad", "roll", "round", "rsqrt", "selu",
    "selu_grad", "shift_left", "shift_right", "sigmoid", "sigmoid_grad", "sign", "silu",
    "silu_grad", "sin", "sinh", "slice", "slice_grad", "slice_scatter", "smooth_l1_loss",
    "smooth_l1_loss_grad", "softplus", "softplus_grad", "softsign", "softsign_grad", "split_qkv",
    "sqrt", "square", "square_sum", "std", "stop_gradient", "strided_slice", "strided_slice_grad",
    "sub", "sub_scalar", "sum", "swiglu", "swiglu_grad", "take_piece", "tan", "tanh", "tanh_grad",
    "tile", "transpose", "trunc", "var", "where", "zeros_like",
})
# fmt: on
