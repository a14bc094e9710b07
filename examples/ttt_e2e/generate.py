"""Continue a text: learn from it chunk by chunk, then write on, at the same cost for each byte.

    python -m examples.ttt_e2e.generate runs/ttt_e2e/tiny-ttt --prompt README.md
    python -m examples.ttt_e2e.generate runs/ttt_e2e/small-ttt --text "def main(" --bytes 2000 --temperature 0.7
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from examples.ttt_e2e import checkpoints, reading, report, train
from examples.ttt_e2e.model import Config, Weights


def load(folder: Path) -> tuple[Config, Weights]:
    """The configuration and the newest weights of a run.

    Raises:
      ValueError: the folder holds no run, or none with a checkpoint.
    """
    config, training = checkpoints.read_config(folder)
    store = checkpoints.Checkpoints(folder) if checkpoints.exist(folder) else None
    if store is None or store.latest() is None:
        raise ValueError(f"{folder} has no checkpoint yet: expected a run without --no-checkpoint")
    state = store.restore(train.start_state(config, train.Training(**training), train.data_mesh()))
    store.close()
    return config, state.weights


def write(weights: Weights, config: Config, prompt: bytes, count: int, temperature: float, seed: int) -> Iterator[int]:
    """Yields `count` bytes that follow a prompt of at least one."""
    tokens = list(prompt)
    with tqdm(total=len(prompt), desc="reading", unit="byte", unit_scale=True) as progress:
        reader, buffer, logits = reading.read_prompt(
            weights, jnp.asarray(np.frombuffer(prompt, np.uint8), jnp.int32), config, progress.update)
    random = jax.random.key(seed)
    for i in range(count):
        if temperature > 0:
            token = int(jax.random.categorical(jax.random.fold_in(random, i), logits / temperature))
        else:
            token = int(jnp.argmax(logits))
        yield token
        tokens.append(token)
        if int(buffer.length) == config.chunk:
            reader = reading.learn_chunk(weights, reader, jnp.asarray(tokens[-config.chunk - 1:], jnp.int32), config)
            buffer = buffer._replace(length=jnp.zeros((), jnp.int32))
        buffer, logits = reading.read_tokens(
            weights, reader, buffer, jnp.asarray([token], jnp.int32), jnp.int32(1), config)


def make_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = report.teaching_parser("generate", __doc__)
    add = parser.add_argument
    add("run", type=Path, metavar="FOLDER", help="the --out of examples.ttt_e2e.train, with a checkpoint")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", type=Path, metavar="FILE", help="a file to read and go on from")
    source.add_argument("--text", help="a text to read and go on from")
    add("--bytes", type=int, default=500, metavar="N", help="bytes to write (default 500)")
    add("--temperature", type=float, default=0.8, help="0 takes the most likely byte (default 0.8)")
    add("--seed", type=int, default=0)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Reads and writes."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        prompt = args.text.encode() if args.prompt is None else args.prompt.read_bytes()
        if not prompt:
            raise ValueError(f"{args.prompt or '--text'} is empty: expected at least one byte to go on from")
        config, weights = load(args.run)
        reading.start_reader(weights, config)
    except (ImportError, OSError, ValueError) as error:
        parser.error(str(error))
    start = time.monotonic()
    try:
        for byte in write(weights, config, prompt, args.bytes, args.temperature, args.seed):
            sys.stdout.buffer.write(bytes([byte]))
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    finally:
        print(f"\n[{time.monotonic() - start:.1f} s]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
