"""TTT-E2E: a transformer that learns from what it reads, trained end to end (arXiv 2512.23675).

    python -m examples.ttt_e2e.train --config tiny                # three minutes on two CPU cores
    python -m examples.ttt_e2e.compare runs/ttt_e2e/*             # loss by position of several runs
    python -m examples.ttt_e2e.generate runs/ttt_e2e/tiny-ttt --prompt README.md

* `model`: the configuration, the weights, and the loss of a sequence
* `data`: files as bytes, cut into batches that depend on the seed and the step alone
* `checkpoints`: what a run leaves behind, whole at every moment
* `train`, `compare`, `generate`: the commands
"""
