"""What Megatron's in-process restart leaves to the next attempt; needs no GPU and no
nvidia-resiliency-ext.

python conformance/upstream/restarted_arguments.py
"""

import inspect
import sys

FLAGS = """--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8
    --micro-batch-size 1 --max-position-embeddings 8 --tokenizer-type NullTokenizer --vocab-size 8
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --lr 1e-3 --mock-data --train-iters 1"""


def main() -> None:
    from megatron.training import get_args, inprocess_restart, training
    from megatron.training.arguments import parse_and_validate_args

    sys.argv[1:] = FLAGS.split()
    parse_and_validate_args()
    get_args()
    inprocess_restart.destroy_state()  # what a restart calls before the next attempt
    try:
        get_args()
        print("arguments are still there")
    except AssertionError as error:
        print(f"after a restart: {error}")
    wrapper = inspect.signature(training.pretrain).parameters["inprocess_call_wrapper"]
    print(f"inprocess_call_wrapper: {str(wrapper.annotation).replace('typing.', '')}")


if __name__ == "__main__":
    main()
