"""A plan's decisions in a framework's own words, which builds the model itself.

The words are data: `../models/frameworks.toml`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_burst.errors import BurstError
from megatron_burst.tools.job.config_flags import table
from megatron_burst.tools.job.model_flags import Values
from megatron_burst.tools.job.strategy import Job, Strategy, least_multiple

_DECISIONS = {  # Megatron's flags: names of decisions in the table
    "--tensor-model-parallel-size": "tp", "--context-parallel-size": "cp",
    "--pipeline-model-parallel-size": "pp", "--expert-model-parallel-size": "ep",
    "--expert-tensor-parallel-size": "etp", "--moe-token-dispatcher-type": "dispatcher",
    "--decoder-last-pipeline-num-layers": "last_stage", "--sequence-parallel": "sp",
    "--context-parallel-impl": "burst", "--seq-length": "tokens",
    "--micro-batch-size": "micro_batch", "--global-batch-size": "batch",
    "--recompute-granularity": "granularity", "--recompute-method": "method",
    "--recompute-num-layers": "every", "--recompute-modules": "modules",
    "--use-distributed-optimizer": "sharded", "--overlap-grad-reduce": "overlap",
}  # fmt: skip
MEGATRON = "megatron"  # itself, whose words are flags
_OURS = "--burst-"  # flags that MEGATRON_BURST has, without this
FRAMEWORKS: Mapping[str, Mapping[str, Any]] = table("frameworks")


def takes_logits(framework: str | None, fsdp: str = "none") -> bool:
    """Whether a framework takes all logits from the model, so that no fused loss runs.

    Raises:
        BurstError: if an FSDP is asked in its words, which only Megatron's are known of.
    """
    if framework in (None, MEGATRON):
        return False
    if fsdp != "none":
        raise BurstError(
            f"plan: --for {framework} must come without --fsdp, because the planner only knows "
            f"Megatron's own settings of FSDP; got --fsdp {fsdp}; leave one of them out"
        )
    return bool(FRAMEWORKS[framework].get("logits"))


def words_of(framework: str, job: Job, strategy: Strategy, flags: Values) -> str:
    """Lines to copy; `flags`: of a plan, as Megatron-LM's command line has them."""
    has = FRAMEWORKS[framework]
    named = [
        (name, value)
        for decision, value in _decisions(job, strategy, flags).items()
        for name in has["words"].get(decision, ())
    ]
    lines = [*has.get("always", ()), *_lines(has, named)]
    if "--recompute-granularity" not in {flag for flag, value in flags.items() if value}:
        lines += has.get("no_recompute", ())
    options = _options(flags)
    ours = [has["options"].format(value=options)] if options else []
    if "command" not in has:
        return "\n".join([*ours, has["before"], *lines])
    before = [has["before"]] if "before" in has else []
    of_shell = ours if has["options"].startswith("MEGATRON_BURST") else []
    lines = [" ".join([*of_shell, has["command"]]), *(ours if not of_shell else ()), *lines]
    return "\n".join([*before, " \\\n    ".join(lines)])


def _decisions(job: Job, strategy: Strategy, flags: Values) -> dict[str, Any]:
    """What a plan decides, by its name in the table."""
    decisions = {_DECISIONS[flag]: value for flag, value in flags.items() if flag in _DECISIONS}
    decisions = {name: value for name, value in decisions.items() if value is not False}
    decisions["rank_tokens"] = job.seq // strategy.cp
    decisions["multiple"] = least_multiple(strategy)
    decisions["again"] = "granularity" in decisions
    if job.packing:
        decisions |= {"packed": True, "packed_tokens": job.seq}
    return decisions


def _options(flags: Values) -> str:
    """The value of MEGATRON_BURST."""
    pairs = []
    for flag, value in flags.items():
        if flag == "--burst-tune":
            pairs.append(str(value))
        elif flag.startswith(_OURS):
            name = flag.removeprefix(_OURS).replace("-", "_")
            pairs.append(f"{name}={1 if value is True else value}")
    return ",".join(pairs)


def _lines(has: Mapping[str, Any], named: list[tuple[str, Any]]) -> Iterator[str]:
    tables: dict[str, dict[str, Any]] = {}  # of YAML, in braces
    for name, value in named:
        outer, dot, inner = name.partition(".")
        if dot and has["values"] == "yaml":
            tables.setdefault(outer, {})[inner] = value
        else:
            yield _line(has, name, value)
    for name, pairs in tables.items():
        inside = ", ".join(f"{key}: {_value('yaml', value)}" for key, value in pairs.items())
        yield has["form"].format(name=name, value=f"{{{inside}}}")


def _line(has: Mapping[str, Any], name: str, value: Any) -> str:
    line = has["form"].format(name=name, value=_value(has["values"], value)).rstrip()
    return f"'{line}'" if has["values"] == "hydra" and isinstance(value, list) else line


def _value(style: str, value: Any) -> str:
    if style == "python":
        return repr(value)
    if isinstance(value, bool):
        return "" if style == "words" else str(value).lower()
    if not isinstance(value, list):
        return str(value)
    return f"[{','.join(value)}]" if style == "hydra" else {"yaml": ","}.get(style, " ").join(value)
