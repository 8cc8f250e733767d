#!/usr/bin/env bash
# All tables of one machine in parts, most of at most 9 minutes, on 4 or 8 GPUs, the most informative rows first. Rows are in
# their CSV as soon as a problem is done.
#
#   benchmarks/everything.sh OUT GPUS [PART...]       OUT: folder of the CSVs; without PART: all parts, in up to 8 hours
#   TINY=1 benchmarks/everything.sh OUT 4             small sizes, to see that it runs; on CPU processes too
#
# correctness   tests, conformance (needs TE=, MEGATRON_LM=: their checkouts)
# one node      one_node, one_node_long, packed (64/8 heads), packed_few (32/8), layers, layers_long, layers_half, layers_megatron
# other sizes   windows (1K, 4K, 16K), short (8K to 32K tokens, batches of 1 to 8), dims (heads of 64, 192/128, 256), fp16
# libraries     peers, peers_packed: torch's context parallelism, DeepSpeed's Ulysses and yunchang, those that are installed,
#               in turns with burst, TransformerEngine and the kernels alone; rounds: burst's, of more or fewer heads
# several       two_nodes, two_nodes_long, packed_nodes, four_nodes       (emulated on this machine)
# steps         slices, slices_14b, slices_2m, slices_own_loss; curves, curves_packed, curves_1b (all of Llama-3.2-1B): losses of 300 steps
# seeds         seeds_64k, seeds_long, seeds_million, ablation, ablation_keep, tensor, weak, strong, prefill: what
#               BurstAttention's and BurstEngine's papers measured; the name seeds stands for all of them; on one GPU
#               its column of each
# recomputation frontier, frontier_experts, frontier_whole (three whole models, 9 minutes each), of packed documents, and
#               frontier_one, frontier_whole_one, of one document: a step's time against its peak, with as many tokens on each
#               GPU, however many there are
# one GPU       kernels, masks, loss_peers (Liger, QuACK and CCE, those that are installed, in turns with burst and Megatron),
#               limits (a matrix product and a copy in the GPU's memory)
# balance       micro-batches of documents against the cost function; on several GPUs steps too, of one context-parallel
#               group and of two, beside simulated ones
# other         before, before_packed, before_long, before_nodes (after `python -m benchmarks.before COMMIT`), accuracy, million, loss
#
# machines      one_network, packed_network: attention on nodes that a network connects; start it on each of them with
#               all GPUs as GPUS, and LAUNCH="torchrun --nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr HOST"
#
# TOTAL_S=seconds: what all parts may take together; each gets as much of what is left, at least 5 minutes: the last may get nothing.
set -uo pipefail
out=$(realpath -m "${1:?folder for the CSVs}")
gpus=${2:?number of GPUs}
shift 2
total=${TOTAL_S:-100000}
grace=40 least=20 # seconds of a command: over its own, and to be started at all
enough=300 # of a part, rather than less of each
tiny=${TINY:-}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
between_nodes=(NCCL_SOCKET_IFNAME=lo NCCL_NSOCKS_PERTHREAD=4 NCCL_SOCKET_NTHREADS=4) # emulated ones
te=(--impl te:p2p --impl te:a2a --impl te:a2a+p2p --impl te:all_gather)
burst=(--impl burst:auto --impl ceiling)
libraries=(--impl torch --impl ulysses --impl ulysses:cudnn --impl yunchang --impl yunchang:ring+flash)
rounds=(--impl=ulysses --impl=burst:intra=gather,heads_per_round={1,2,4,8} --impl=burst:intra=a2a,heads_per_round=2)
same_kernel=(--impl burst:backend=cudnn --impl ceiling:cudnn)
all_heads=32/8,32/32,8/2,8/1
seeds="seeds_64k seeds_long seeds_million ablation ablation_keep tensor weak strong prefill"

most() { # of these seconds, those that the part has left
    local rest=$((until - SECONDS - grace))
    echo $(($1 < rest ? $1 : rest))
}

sized() { # arguments of a full run, of a tiny one
    if [[ -z $tiny ]]; then echo "$1"; else echo "$2"; fi
}

within() { # seconds, then a command that takes --budget-s and may end `grace` later; nothing if little time is left
    local seconds
    seconds=$(most "$1")
    shift
    if ((seconds < least)); then
        echo "== no time was left for: $*"
        return
    fi
    timeout $((seconds + grace)) "$@" --budget-s "$seconds"
}

bench() {
    local launch
    read -ra launch <<<"${LAUNCH:-torchrun --nproc-per-node $gpus}"
    within "$1" "${launch[@]}" -m "benchmarks.$2" "${@:3}"
}

attention() { # seconds, lengths, heads, file, more options
    local sizes
    sizes=$(sized "--seq $2 --heads $3" "--seq 1K --heads 8/4,8/8 --head-dim 8 --reps 2")
    # shellcheck disable=SC2086
    bench "$1" attention --out "$out/$4.csv" "${@:5}" $sizes
}

packed() { # seconds, lengths, heads, file, more options
    local sizes
    sizes=$(sized "--seq $2 --heads $3" "--seq 1K --heads 8/4 --head-dim 8 --reps 2")
    # shellcheck disable=SC2086
    bench "$1" packed --documents drawn --out "$out/$4.csv" "${burst[@]}" --impl burst:auto@zigzag "${te[@]}" "${@:5}" \
        $sizes
}

layers() { # seconds, length, modes
    local modes=() sizes
    for mode in "${@:3}"; do modes+=(--mode "$mode"); done
    sizes=$(sized "--seq $2 --layers 4" "--seq 1K --layers 2 --heads 8/4 --head-dim 8 --hidden 32 --ffn 64")
    # shellcheck disable=SC2086
    bench "$1" recompute $sizes --reps 1 "${modes[@]}" --out "$out/recompute.csv"
}

on_nodes() { # number, then a function with its arguments
    if ((gpus % $1 || gpus <= $1)); then
        echo "== $gpus GPUs are not $1 nodes"
        return
    fi
    export "${between_nodes[@]}"
    "${@:2}" --nodes "$1"
    unset "${between_nodes[@]%%=*}"
}

steps() { # seconds, file, GPUs, implementations, more options: of BurstEngine's 14B with 32K tokens a GPU
    local runs=() what="burstengine-14b-$((32 * $3))K"
    if [[ -n $tiny ]]; then what=tiny-256 && runs=(--tiny); fi
    for impl in $4; do runs+=(--only "$what:$impl"); done
    within "$1" python3 -m benchmarks.slices measure "$out/$2.csv" --gpus "$3" "${runs[@]}" "${@:5}"
}

scaling() { # weak or strong, on 1, 2, 4, ... GPUs; then the picture, with what the planner says
    local count
    for ((count = 1; count <= $(sized "$gpus" 2); count *= 2)); do
        if [[ $1 == weak || -n $tiny ]]; then
            steps 110 scaling "$count" burst
        else
            within 110 python3 -m benchmarks.slices measure "$out/scaling.csv" --gpus "$count" \
                --only burstengine-14b-256K:burst
        fi
    done
    [[ -f "$out/planned.csv" ]] || python3 -m benchmarks.scaling plan "$out/planned.csv"
    python3 -m benchmarks.scaling draw "$out/scaling.png" --measured "$out/scaling.csv" --planned "$out/planned.csv"
}

ablation() { # implementations; of one GPU those that it tells apart
    if ((gpus == 1)); then
        steps 480 ablation 1 "$(tr ' ' '\n' <<<"$1" | grep -vx -e backward -e nested)"
    elif ((gpus < 4)); then # no two nodes of two ranks
        steps 480 ablation "$gpus" "$1"
    else
        on_nodes 2 steps 480 ablation "$(sized "$gpus" 2)" "$1"
    fi
}

prefill() { # the time to the first token; one GPU also computes what one of 8 would
    local sizes
    sizes=$(sized "--seq 32K,64K,128K,256K" "--model tiny --seq 256")
    # shellcheck disable=SC2086
    bench "$((gpus > 1 ? 480 : 240))" prefill --out "$out/prefill.csv" $sizes
    # shellcheck disable=SC2086
    ((gpus > 1)) || bench 240 prefill --out "$out/prefill.csv" $sizes --rank-of 8
}

seeds() { # seconds, lengths, batches
    attention "$1" "$2" 32/32 seeds "${burst[@]}" "${te[@]}" --impl one-gpu --reps 5 --mask causal,full \
        --batch "$(sized "$3" 1,2)"
}

slices() { # seconds, runs
    local runs=()
    for name in "${@:2}"; do runs+=(--only "$name"); done
    # shellcheck disable=SC2046
    within "$1" python3 -m benchmarks.slices measure "$out/slices.csv" --gpus "$gpus" $(sized "${runs[*]}" --tiny)
}

frontier() { # seconds, thousands of tokens a GPU, arguments of a full run, of a tiny one
    # shellcheck disable=SC2046
    bench "$1" frontier measure "$out/frontier.csv" \
        $(sized "--seq $(($2 * gpus))K $3" "$4 --seq 256 --turns 1 --steps 1")
}

whole_models() { # more options
    local models model
    read -ra models <<<"$(sized "qwen3-1.7b qwen3-4b llama3.2-1b" tiny)"
    for model in "${!models[@]}"; do
        frontier $(($(most 1620) / (${#models[@]} - model))) 64 "--model ${models[$model]} $*" "--model ${models[$model]} $*"
    done
}

curves() { # of which samples, more options; tiny: of both
    local runs=(--only="$1":{megatron,burst,megatron-other,megatron-again})
    # shellcheck disable=SC2046
    within 480 python3 -m benchmarks.loss_curves "$out/loss_curves.csv" --gpus "$(sized "$gpus" 2)" \
        $(sized "${runs[*]} ${*:2}" "--tiny --steps 10")
}

balance() { # on one GPU as one rank of 2, 4 and 8 computes; several are one context-parallel group, then two
    local sizes dp
    sizes=$(sized "--model qwen3-8b --tokens 16K" "--model tiny --tokens 512 --reps 1")
    # shellcheck disable=SC2086
    bench 330 balance_measured micro-batches "$out/balance_costs.csv" $sizes --count "$(sized 30 2)" || return
    for dp in 1 2; do
        # shellcheck disable=SC2086
        ((gpus == 1)) || bench 105 balance_measured steps "$out/balance_steps.csv" --costs "$out/balance_costs.csv" $sizes \
            --dp "$dp" --draws "$(sized 2 1)"
    done
}

part() {
    case $1 in
        tests) timeout "$(most 530)" python3 -m pytest tests/gpu -m gpu -n "$(sized 5 1)" --dist worksteal -q -rf \
            --junit-xml "$out/tests.xml" ;;
        conformance) timeout "$(most 530)" python3 -m conformance.run --lanes "$(sized 4 1)" --ranks 4 --limit-s 500 \
            --out "$out/conformance" ;;
        one_node) attention 480 64K,128K,256K "$all_heads" one_node "${burst[@]}" "${te[@]}" "${same_kernel[@]}" --reps 10 ;;
        one_node_long) attention 480 512K "$all_heads" one_node "${burst[@]}" "${te[@]:0:6}" "${same_kernel[@]}" --reps 5 ;;
        one_network) attention 480 128K,256K,512K "$all_heads" network "${burst[@]}" "${te[@]}" "${same_kernel[@]}" --reps 5 ;;
        packed_network) packed 400 128K,256K,1M 64/8 packed_network "${same_kernel[@]}" --reps 5 ;;
        peers) attention 480 64K,128K,256K "$all_heads" peers "${burst[@]}" "${te[@]:0:4}" "${libraries[@]}" \
            "${same_kernel[@]}" --reps 10 ;;
        peers_packed) packed 300 64K,128K,256K 64/8 peers_packed "${same_kernel[@]}" --impl ulysses --impl flex --reps 10 ;;
        rounds) # how many KV heads at a time, beside Ulysses, which has all of a rank at once
            attention 220 64K,128K 32/8,32/32 rounds "${burst[@]}" "${rounds[@]}" --impl burst:intra=a2a --reps 5
            packed 240 128K,256K 64/8 rounds_packed "${rounds[@]}" --impl burst:intra=a2a@zigzag --reps 5
            ;;
        two_nodes) on_nodes 2 attention 480 64K,128K "$all_heads" two_nodes "${burst[@]}" "${te[@]}" --reps 10 ;;
        two_nodes_long) on_nodes 2 attention 480 256K,512K "$all_heads" two_nodes "${burst[@]}" "${te[@]}" --reps 5 ;;
        four_nodes) on_nodes 4 attention 120 64K,128K 32/8,32/32 four_nodes "${burst[@]}" "${te[@]:0:6}" --reps 5 ;;
        packed) packed 400 64K,128K,256K,1M 64/8 packed "${same_kernel[@]}" --reps 10 ;;
        packed_few) packed 400 32K,64K,128K,256K 32/8 packed "${same_kernel[@]}" --reps 10 ;;
        windows) # shellcheck disable=SC2046
            bench 480 packed --out "$out/windows.csv" --reps 5 \
                $(sized "--seq 64K,128K,256K --heads 64/8,32/8 --window 1K,4K,16K" "--seq 1K --heads 8/4 --head-dim 8 --window 64") ;;
        short) attention 480 8K,16K,32K 32/8,32/32 short "${burst[@]}" "${te[@]:0:4}" --batch "$(sized 1,2,4,8 1,2)" --reps 10 ;;
        dims)
            for dim in $(sized "64 192/128 256" 8); do
                attention 140 64K,128K 32/8,32/32 dims "${burst[@]}" --impl burst:a2a "${te[@]:0:4}" --head-dim "$dim" --reps 5
            done
            ;;
        fp16) attention 300 64K,128K 32/8,32/32 fp16 "${burst[@]}" "${te[@]:0:4}" "${same_kernel[@]}" --dtype float16 --reps 5 ;;
        packed_nodes) on_nodes 2 packed 400 64K,128K,256K,1M 64/8 packed_nodes --reps 5 ;;
        layers) layers 300 512K burst:{none,half,all,all-half-layers,all-offload} megatron:{full,full-keep} ;;
        layers_long) layers 480 1M burst:{none,all} ;;
        layers_half) layers 480 1M burst:{half,all-half-layers} ;;
        layers_megatron) layers 480 1M megatron:{full,full-keep} ;;
        before) attention 300 64K,128K,256K "$all_heads" before --impl burst:auto --impl before --reps 10 ;;
        before_long) attention 300 512K "$all_heads" before --impl burst:auto --impl before --reps 5 ;;
        before_nodes) on_nodes 2 attention 420 64K,128K,256K,512K "$all_heads" before --impl burst:auto --impl before \
            --reps 5 ;;
        before_packed) # shellcheck disable=SC2046
            bench 240 packed --documents drawn --impl burst:auto --impl before --reps 10 --out "$out/before_packed.csv" \
                $(sized "--seq 32K,64K,128K,256K --heads 64/8,32/8" "--seq 1K --heads 8/4 --head-dim 8") ;;
        slices) slices 480 8b-1M:burst 8b-1M:megatron ;; # a run ends after 200 s, with the steps that it has
        slices_14b) [[ -n $tiny ]] || slices 480 14b-1M:burst 14b-1M:megatron ;;
        slices_2m) [[ -n $tiny ]] || slices 480 8b-2M:burst 8b-2M:megatron ;;
        slices_own_loss) [[ -n $tiny ]] || slices 240 8b-1M:megatron-own-loss ;;
        seeds_64k) seeds 480 64K 1,2,4,8 ;;
        seeds_long) [[ -n $tiny ]] || seeds 480 128K,256K,512K 1 ;;
        seeds_million) [[ -n $tiny ]] || seeds 480 1M 1 ;;
        ablation) ablation "base backward nested fused-loss" ;;
        ablation_keep) ablation "fused-loss half whole planned burst" ;;
        tensor) steps 480 tensor "$(sized "$gpus" 2)" "tp tp-v1 burst megatron" ;;
        weak | strong) scaling "$1" ;;
        prefill) prefill ;;
        frontier) frontier 480 64 "--model qwen3-8b --turns 2 --steps 3" "--model tiny" ;;
        frontier_one) frontier 540 64 "--model qwen3-8b --documents none --turns 2 --steps 3" "--model tiny --documents none" ;;
        frontier_whole) whole_models ;;
        frontier_whole_one) whole_models --documents none ;;
        frontier_experts) frontier 480 32 "--model qwen3-30b-a3b" "--model tiny-moe" ;;
        curves) curves whole ;;
        curves_packed) [[ -n $tiny ]] || curves packed ;;
        curves_1b) [[ -n $tiny ]] || curves whole --model llama3.2-1b ;;
        balance) balance ;;
        accuracy) timeout "$(most 60)" torchrun --nproc-per-node "$gpus" -m benchmarks.accuracy "$out/accuracy.csv" ;;
        million) attention 190 1M 32/8,32/32 one_node "${burst[@]}" --impl te:p2p --impl te:a2a --reps 1 ;;
        loss) # shellcheck disable=SC2046
            bench 60 loss $(sized "--tokens 128K --hidden 4096 --vocab 128K" "--tokens 1K --hidden 32 --vocab 1K") \
                --impl burst:recompute --impl burst:forward --impl megatron:fused --out "$out/loss.csv"
            ;;
        loss_peers) # shellcheck disable=SC2046
            within 300 python3 -m benchmarks.loss --out "$out/loss_peers.csv" \
                $(sized "--tokens 8K,32K,128K --hidden 4096 --vocab 128K" "--tokens 1K --hidden 32 --vocab 1K") ;;
        kernels) within 300 python3 -m benchmarks.kernels "$out/kernels.csv" --seqs "$(sized 8192,16384,32768 1024)" ;;
        limits) timeout "$(most 60)" python3 -m benchmarks.limits --out "$out/limits.csv" ;;
        masks) timeout "$(most 300)" python3 -m benchmarks.masks "$out/masks.csv" ;; # reads TINY
        *)
            echo "everything.sh: no part $1; see the first lines of it" >&2
            exit 1
            ;;
    esac
}

every="tests one_node packed peers peers_packed rounds two_nodes layers packed_nodes packed_few windows before before_packed
    before_nodes conformance one_node_long two_nodes_long short dims fp16 layers_long layers_half layers_megatron before_long
    slices four_nodes accuracy million slices_14b slices_2m slices_own_loss loss loss_peers limits masks kernels curves curves_packed
    curves_1b balance frontier frontier_one frontier_whole frontier_whole_one frontier_experts one_network packed_network $seeds"
asked=" ${*:-$every} "
read -rd '' -a parts <<<"${asked// seeds / $seeds }"
left=${#parts[@]}
for one in "${parts[@]}"; do
    echo "== $one"
    if ((total - SECONDS < grace + least)); then
        echo "== no time was left"
        continue
    fi
    share=$(((total - SECONDS) / left))
    until=$((SECONDS + (share > enough ? share : enough)))
    until=$((until < total ? until : total))
    part "$one"
    echo "== $one ended with $? after $SECONDS s in all"
    left=$((left - 1))
done
