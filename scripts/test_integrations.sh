#!/usr/bin/env bash
# Runs tests/integrations with the frameworks that build on Megatron, and with those that do without,
# and tests of what else `make install` leaves out, on the CPU:
#
#     [FRAMEWORKS="bridge nemo-rl"] [WHEELS=folder] [NEMO_RL=clone] [SLIME=clone] [ROLL=clone]
#     [VERL_TREES=clone] scripts/test_integrations.sh [pytest's arguments]
#
# Each gets an environment below .venvs/. Megatron-Bridge and mcore-bridge import TransformerEngine,
# whose PyTorch part is built from source, with the headers in wheels and without a CUDA toolkit (25
# minutes of a core), or taken from WHEELS. What is in no registry is a clone, which NEMO_RL (with
# 7ea279a), SLIME (at 624b824), ROLL (at v0.3.0) and VERL_TREES (verl's draft #6689, at 7aeb42a) name;
# without one its tests are skipped. nvidia-resiliency-ext's wheel needs glibc 2.39.
# Prints a table at the end; fails if any row of it does.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

# name | packages, with what they ask for | packages alone: what they ask for needs GPUs
environments='
bridge  | transformers>=5.8,<=5.12.1 omegaconf hydra-core pyyaml tqdm six regex datasets tensorboard nvidia-modelopt megatron-energon onnxscript pydantic importlib-metadata nvdlfw-inspect nvidia-cuda-crt<13.1 nvidia-cuda-cccl<13.1 | transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 transformer-engine-torch==2.20.2 megatron-bridge==0.6.2
nemo-rl | ray transformers>=5.8,<=5.12.1 omegaconf hydra-core pyyaml tqdm six regex datasets tensorboard nvidia-modelopt megatron-energon onnxscript pydantic importlib-metadata nvdlfw-inspect nvidia-cuda-crt<13.1 nvidia-cuda-cccl<13.1 | transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 transformer-engine-torch==2.20.2 megatron-bridge==0.6.2
verl    | verl==0.9.1 mbridge==0.15.1 transformers cachetools uvicorn fastapi |
ms-swift | ms-swift[megatron]==4.6.0 mcore-bridge==1.6.5 transformers msgspec onnxscript pydantic importlib-metadata nvdlfw-inspect nvidia-cuda-crt<13.1 nvidia-cuda-cccl<13.1 | transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 transformer-engine-torch==2.20.2
slime   | numpy<2 transformers ray pybase64 six pyyaml httpx omegaconf wandb tensorboard |
roll    | megatron-core==0.18.2 transformers accelerate peft |
hf      | transformers==5.24.0 accelerate==1.15.0 trl==1.16.0 datasets peft bitsandbytes |
torchtitan | torch==2.13.0 torchtitan==0.3.0 |
restarted | nvidia-resiliency-ext==0.7.0 |
library-peers | deepspeed==0.19.8 yunchang==0.6.4 |
'
[ -z "${WHEELS:-}" ] || export UV_FIND_LINKS=$WHEELS
table=""
failed=0

while IFS='|' read -r name packages alone; do
    name=${name// /}
    [[ " ${FRAMEWORKS:-$name} " == *" $name "* ]] && [ -n "$name" ] || continue
    mkdir -p .cache
    output=.cache/integrations-$name.txt
    BURST_ENVIRONMENT=$name BURST_PACKAGES=$packages BURST_ALONE=$alone scripts/bootstrap.sh \
        ".venvs/$name/bin/python" -m pytest -q -p no:cacheprovider \
        tests/*/test_"${name//-/_}"*.py "$@" 2>&1 </dev/null | tee "$output"
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
    table+=$(printf '%-10s %s' "$name" "$(tail -1 "$output")")$'\n'
done <<<"$environments"
printf '\n%s' "$table"
exit "$failed"
