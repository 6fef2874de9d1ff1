"""Trains oscine-nano: `python -m training.train --out FOLDER`. Needs one CUDA GPU; a tiny run works on a CPU.

A run ends after `--steps`, or when `--seconds` are used up. The learning rate follows whichever is further.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from training.attention import DocumentAttention
from training.export import export
from training.model import GptOss, Size
from training.optimizer import make_optimizers
from training.packed_attention import PackedAttention
from training.packing import Encoder, PackedRows, Row

NANO = Path("oscine/model/nano")  # where the tokenizer is
_BALANCE = 0.01  # weight of the load-balancing loss
_LOG_EVERY = 50  # steps
_EXPORT_EVERY = 90.0  # seconds


def main() -> None:
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    encoder = Encoder(NANO)
    model = GptOss(replace(Size(), vocab_size=encoder.tokenizer.vocab_size), options.seed).to(device)
    if options.resume:
        model.load_state_dict(_read_master(options.resume))
    rows = batches(options, device)
    train(model, rows, options, lambda: export(model, options.out, encoder.tokenizer))
    export(model, options.out, encoder.tokenizer)
    _write_master(model, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the export and the master weights")
    parser.add_argument("--resume", type=Path, help="folder of an earlier run to start from")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6000, help="most steps (default: %(default)s)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=1e9,
        help="most seconds of training, compilation included (default: %(default)s)",
    )
    parser.add_argument("--rows", type=int, default=8, help="rows per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens per row (default: %(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="learning rate of Muon (default: %(default)s)")
    parser.add_argument("--adam-lr", type=float, default=0.003, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=13, help="processes that generate data (default: %(default)s)")
    return parser.parse_args()


def train(
    model: GptOss, batches: Iterator[list[Tensor]], options: argparse.Namespace, save: Callable[[], None]
) -> None:
    optimizers = make_optimizers(model, options.muon_lr, options.adam_lr)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_of = torch.compile(_losses, dynamic=False) if next(model.parameters()).is_cuda else _losses
    began = logged = saved = time.monotonic()
    for step in range(options.steps):
        elapsed = time.monotonic() - began
        progress = max(step / options.steps, elapsed / options.seconds)
        if progress >= 1:
            break
        for optimizer, bases in zip(optimizers, rates, strict=True):
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * schedule(step, progress)
        ids, starts, weights = next(batches)
        loss, answer_loss, balance = loss_of(model, ids, starts, weights)
        (loss + _BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step < 3:
            now = time.monotonic()
            rate = _LOG_EVERY * starts.numel() / (now - logged)
            print(
                f"step {step:5} {now - began:6.1f} s  loss {loss.item():.4f}  answers {answer_loss.item():.4f}  "
                f"balance {balance.item():.3f}  {rate / 1e6:.2f} M tokens/s",
                flush=True,
            )
            logged = now
            if not loss.isfinite():
                raise RuntimeError(f"the loss is {loss.item()} at step {step}")
        if time.monotonic() - saved > _EXPORT_EVERY:
            save()
            saved = time.monotonic()
    print(f"{step} steps of {starts.numel()} tokens in {time.monotonic() - began:.1f} s", flush=True)


def schedule(step: int, progress: float) -> float:
    """Warm-up over 50 steps, flat to 35 %, then linear to zero."""
    return min(1.0, (step + 1) / 50, max(0.0, (1 - progress) / 0.65))


def _losses(model: GptOss, ids: Tensor, starts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy, that of the answers alone, and the load-balancing loss."""
    device = ids.device.type
    attend = (PackedAttention if device == "cuda" else DocumentAttention)(model.size, starts)
    positions = torch.arange(starts.shape[1], device=ids.device) - starts
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        logits, balance = model(ids[:, :-1], positions, attend)
    losses = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weights = weights.flatten()
    answers = (weights == 1).float()
    return (losses * weights).sum() / weights.sum(), (losses * answers).sum().detach() / answers.sum(), balance


def batches(options: argparse.Namespace, device: str) -> Iterator[list[Tensor]]:
    rows = PackedRows(NANO, options.length, options.seed)
    loader = DataLoader(
        rows,
        batch_size=options.rows,
        num_workers=options.workers,
        prefetch_factor=16 if options.workers else None,
        pin_memory=device == "cuda",
    )
    for batch in loader:
        yield [tensor.to(device, non_blocking=True) for tensor in Row(*batch)]


def _write_master(model: GptOss, folder: Path) -> None:
    """Two files of bfloat16 master weights, from which --resume starts."""
    tensors = {name: tensor.cpu().bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    names = list(tensors)
    for part in range(2):
        save_file({name: tensors[name] for name in names[part::2]}, folder / f"master{part}.safetensors")


def _read_master(folder: Path) -> dict[str, Tensor]:
    parts = [load_file(folder / f"master{part}.safetensors") for part in range(2)]
    return {name: tensor.float() for part in parts for name, tensor in part.items()}


if __name__ == "__main__":
    main()
