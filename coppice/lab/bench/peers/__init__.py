"""`coppice bench peers`: other engines and us on the same weights and prompts.

`server` has other engines as contenders; `llama_cpp` and `openvino` are their processes, and import nothing but the
engine and the standard library, since `make peers` gives them an environment of their own. `suite` measures, `figures`
has ratios and kinds of prompts.
"""
