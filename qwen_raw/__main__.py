"""`python -m qwen_raw` is `qwen-raw`."""

from qwen_raw.cli.main import entry

if __name__ == "__main__":
    entry()
