"""What the tests of `gptmanager bench` run: a few short requests on a model of random weights."""

from gptmanager.bench import SMALL_LLAMA, Load

LOAD = Load(num_requests=5, prompt_len=(3, 20), output_len=(2, 9))
TINY = {**SMALL_LLAMA, "vocab_size": 96, "hidden_size": 32, "intermediate_size": 56}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
