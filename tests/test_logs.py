"""What users see of the package's log: one line by default, once, and no more than they want."""

import re
import subprocess
import sys

import pytest

SAYS = (
    "from megatron_burst.logs import log_message; log_message('a line'); log_message('another'); "
)
MEGATRONS = "import sys, logging; logging.basicConfig(stream=sys.stdout, level=logging.INFO, format='%(message)s'); "  # noqa: E501


@pytest.mark.parametrize(
    "before, after, out, err",
    [
        ("", "", "", "a line\nanother\n"),
        (MEGATRONS, "", "a line\nanother\n", ""),
        ("import logging; logging.warning('w'); ", "", "", "WARNING:root:w\nINFO:megatron_burst:a line\nINFO:megatron_burst:another\n"),  # noqa: E501
        ("import logging; logging.getLogger('megatron_burst').setLevel('WARNING'); ", "", "", ""),
        ("import logging; logging.basicConfig(level=logging.ERROR); ", "", "", ""),
        ("", f"{MEGATRONS} log_message('last')", "last\n", "a line\nanother\n"),
        ("import megatron_burst, logging; assert not logging.getLogger('megatron_burst').handlers; import sys; sys.exit() #", "", "", ""),  # noqa: E501
    ],
)  # fmt: skip
def test_lines_go_where_logging_says_and_else_to_standard_error(before, after, out, err):
    command = [sys.executable, "-c", before + SAYS + after]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (out, err)


def test_nothing_but_the_command_line_prints():
    from pathlib import Path

    import megatron_burst

    package = Path(megatron_burst.__file__).parent
    printing = [
        path for path in package.rglob("*.py")
        if re.search(r"\bprint\(", path.read_text()) and "tools" not in path.parts
    ]  # fmt: skip
    assert printing == []
