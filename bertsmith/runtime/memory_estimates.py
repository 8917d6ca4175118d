"""Lower bounds for the memory that a model needs.

A run whose estimate exceeds the available memory is rejected. A run with a lower estimate may still
run out of memory.
"""

from bertsmith.model.config import ModelConfig


def estimate_num_parameters(config: ModelConfig) -> int:
    """Return the number of weights in the embeddings and in the linear layers of the encoder."""
    num_embeddings = config.vocab_size + config.max_positions + config.segments
    return num_embeddings * config.width + _count_matrix_weights(config)


def _count_matrix_weights(config: ModelConfig) -> int:
    """Return the number of weights in the linear layers of the encoder."""
    weights_per_layer = 4 * config.width * config.width + 2 * config.width * config.feed_forward
    return config.layers * weights_per_layer


def estimate_training_bytes(config: ModelConfig, num_tokens: int, optimizer: str = "adamw") -> int:
    """Return the memory of a training step with ``num_tokens`` tokens per micro-batch, in bytes.

    Counts the weights, the gradients and the moments in float32, and activations that are saved for
    the backward pass in 16 bits. AdamW has two moments. Muon ("muon") has one for the weights of
    the linear layers, and AdamW's two for the others. The activations of a layer are the inputs of
    the two linear layers of attention, the queries, keys and values, the input of the activation
    function and the input of the linear layer after it.
    """
    weight_bytes = 4 * estimate_num_parameters(config)
    activation_bytes_per_token = 2 * config.layers * (5 * config.width + 2 * config.feed_forward)
    moment_bytes = 2 * weight_bytes
    if optimizer == "muon":
        moment_bytes -= 4 * _count_matrix_weights(config)
    return 2 * weight_bytes + moment_bytes + num_tokens * activation_bytes_per_token


def estimate_inference_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the memory of a forward pass on a batch of ``num_tokens`` tokens, in bytes.

    This is a lower bound for every precision, because it assumes 8 bits per weight and activation.
    """
    activation_bytes = num_tokens * (4 * config.width + config.feed_forward)
    return estimate_num_parameters(config) + activation_bytes
