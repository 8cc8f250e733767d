"""Entry point for `python -m megatron_burst.cli COMMAND ...`, also under torchrun."""

from megatron_burst.cli.main import app

if __name__ == "__main__":
    app(prog_name="megatron-burst")
