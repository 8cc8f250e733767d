"""Entry point for `python -m megatron_burst.tools COMMAND ...`, also under torchrun."""

from megatron_burst.tools.main import app

if __name__ == "__main__":
    app(prog_name="megatron-burst")
