"""Other people's libraries, measured beside ours. Optional: nothing in qwen_raw needs them."""
