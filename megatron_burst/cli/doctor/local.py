"""All checks of one machine by itself."""

from collections.abc import Mapping

from megatron_burst.cli.doctor.gpus import check_nvlink, check_state, gpus_of
from megatron_burst.cli.doctor.network import check_network
from megatron_burst.cli.doctor.record import Check, Status
from megatron_burst.cli.doctor.software import (
    check_backends,
    check_seams,
    check_te_kernels,
    check_torch,
    check_versions,
    software,
)
from megatron_burst.cli.doctor.survey import Answer, Survey
from megatron_burst.cli.doctor.system import (
    check_connections,
    check_environment,
    check_limits,
    check_shm,
)


def check_machine(
    survey: Survey | Answer, environ: Mapping[str, str], in_job: bool = False
) -> list[Check]:
    """Everything about this machine.

    Args:
        survey: of this machine, or why there is none.
        environ: environment variables.
        in_job: whether they are those of a training job.
    """
    installed = software()
    found = [check_versions(installed), *check_te_kernels(installed, environ)]
    if isinstance(survey, Answer):
        why = survey.error or f"exit status {survey.code}"
        found.append(Check("survey", Status.SKIP, f"the machine's state is not known: {why}"))
    else:
        found += _of_survey(survey, environ, in_job)
    gpus = [] if isinstance(survey, Answer) else gpus_of(survey)
    return [
        *found,
        check_torch(len(gpus)),
        check_backends(),
        check_seams(),
        *check_environment(environ),
    ]


def _of_survey(survey: Survey, environ: Mapping[str, str], in_job: bool) -> list[Check]:
    # the job's own ranks are no strangers; what takes much memory still is
    state = survey.without("processes") if in_job else survey
    return [
        *check_state(state),
        check_nvlink(survey),
        *check_network(survey),
        check_shm(survey),
        *check_limits(survey),
        check_connections(survey, environ, in_job),
    ]
