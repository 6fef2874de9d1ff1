"""Trains the EAGLE-3 head of oscine-nano: `python -m training.eagle --out FOLDER`. A CUDA GPU is best; a CPU works.

The target computes the conversations of training, and the head learns its probabilities: those of the token after the
next one, and of the K - 1 that follow, from the head's own hidden states. A run ends as in train.py.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from training.attention import DocumentAttention
from training.eagle_head import Attend, Head, HeadSize, export_head, load_head
from training.export import load
from training.model import GptOss
from training.optimizer import Muon
from training.packed_attention import PackedAttention, of_documents
from training.train import NANO, batches, schedule

DRAFTS = 4  # of training
_PROMPT_WEIGHT = 0.02  # loss weight of tokens that the model does not write itself
_DECAY = 0.9  # of the loss weight from draft to draft
_LOG_EVERY = 50  # steps


def main() -> None:
    options = _options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    target = load(NANO, device)
    size = HeadSize(aux_layers=tuple(options.aux_layers), intermediate=options.intermediate, heads=options.heads)
    head = (load_head(options.resume) if options.resume else Head(size, options.seed)).to(device)
    rows = batches(options, device)
    if not options.resume:
        ids, starts, _ = next(rows)
        head.begin_at(target.lm_head.weight, run_target(target, ids[:, :-1], starts)[0])
    train(head, target, rows, options)
    export_head(head, options.out)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the head")
    parser.add_argument("--resume", type=Path, help="folder of a head to start from")
    parser.add_argument("--seed", type=int, default=1, help="seed of weights and data (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100_000, help="most steps (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1e9, help="most seconds of training (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=8, help="rows per step (default: %(default)s)")
    parser.add_argument("--length", type=int, default=8192, help="tokens per row (default: %(default)s)")
    parser.add_argument("--muon-lr", type=float, default=0.02, help="learning rate of Muon (default: %(default)s)")
    parser.add_argument("--adam-lr", type=float, default=0.002, help="learning rate of Adam (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=13, help="processes that generate data (default: %(default)s)")
    parser.add_argument(
        "--aux-layers", type=int, nargs="+", default=HeadSize().aux_layers, help="streams (default: %(default)s)"
    )
    parser.add_argument("--intermediate", type=int, default=512, help="width of the MLP (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="query heads (default: %(default)s)")
    return parser.parse_args()


def train(head: Head, target: GptOss, rows: Iterator[list[Tensor]], options: argparse.Namespace) -> None:
    optimizers = _optimizers(head, options.muon_lr, options.adam_lr)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_of: Callable[..., Any] = losses
    if next(head.parameters()).is_cuda:
        loss_of = torch.compile(losses, dynamic=False)
    began = logged = time.monotonic()
    for step in range(options.steps):
        progress = max(step / options.steps, (time.monotonic() - began) / options.seconds)
        if progress >= 1:
            break
        for optimizer, bases in zip(optimizers, rates, strict=True):
            for group, base in zip(optimizer.param_groups, bases, strict=True):
                group["lr"] = base * schedule(step, progress)
        loss, right = loss_of(head, target, *next(rows))
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % _LOG_EVERY == 0 or step < 3:
            now = time.monotonic()
            shares = " ".join(f"{share:.1%}" for share in right.tolist())
            print(
                f"step {step:5} {now - began:6.1f} s ({now - logged:5.1f} s)  loss {loss.item():.4f}  right {shares}",
                flush=True,
            )
            logged = now
    print(f"{step} steps of {options.rows * options.length} tokens in {time.monotonic() - began:.1f} s", flush=True)


def _optimizers(head: Head, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the output matrix and the norms."""
    own = dict(head.named_parameters())
    output, norms = own.pop("lm_head.weight"), [own.pop(name) for name in [*own] if own[name].dim() == 1]
    fused = output.is_cuda
    return [
        Muon(own.values(), muon_lr, weight_decay=0.02),
        torch.optim.AdamW([output, *norms], adam_lr, betas=(0.9, 0.98), eps=1e-8, weight_decay=0.0, fused=fused),
    ]


def losses(head: Head, target: GptOss, ids: Tensor, starts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy between the head's and the target's probabilities, and for each draft the share of answers'
    tokens that it gets right where all drafts before it did."""
    with torch.no_grad():
        streams, logits_BTV = run_target(target, ids[:, :-1], starts)
        answers_BT = (weights == 1).float()
        weights_BT = answers_BT + _PROMPT_WEIGHT * (1 - answers_BT)
        best_BT = logits_BTV.argmax(-1)
    loss, rights = ids.new_zeros((), dtype=torch.float32), []
    so_far = torch.ones_like(answers_BT)
    for s, drafted in enumerate(unrolled(head, target, streams, ids, starts), 1):
        valid_BT = _ahead(starts + 1, s) == starts + 1  # still the same document
        wanted_BTV = _ahead(logits_BTV, s).float().softmax(-1)
        entropy_BT = -(wanted_BTV * drafted.float().log_softmax(-1)).sum(-1)
        scale_BT = _ahead(weights_BT, s) * valid_BT
        loss = loss + _DECAY ** (s - 1) * (entropy_BT * scale_BT).sum() / scale_BT.sum()
        counted_BT = _ahead(answers_BT, s) * valid_BT * so_far
        so_far = so_far * (drafted.detach().argmax(-1) == _ahead(best_BT, s))
        rights.append((counted_BT * so_far).sum() / counted_BT.sum())
    return loss, torch.stack(rights)


def run_target(target: GptOss, ids_BT: Tensor, starts_BT: Tensor) -> tuple[list[Tensor], Tensor]:
    """The residual streams before each layer and after the last one, and the logits."""
    device = ids_BT.device.type
    streams: list[Tensor] = []
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        attend = (PackedAttention if device == "cuda" else DocumentAttention)(target.size, starts_BT)
        logits, _ = target(ids_BT, _positions(starts_BT), attend, streams)
    return streams, logits


def unrolled(
    head: Head, target: GptOss, streams: list[Tensor], ids: Tensor, starts: Tensor, drafts: int = DRAFTS
) -> list[Tensor]:
    """The logits of each draft [B, T, V]: the s-th at p is for the token at p + s + 1. `ids` is [B, T + 1]."""
    device = ids.device.type
    positions_BT = _positions(starts)
    attend = _attention(starts)
    earlier: list[tuple[Tensor, Tensor]] = []
    drafted = []
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden_BTH = head.features(streams).float()
        embedded = target.model.embed_tokens(ids)
        for s in range(1, drafts + 1):
            tokens_BTH = _ahead(embedded, s)[:, :-1]
            hidden_BTH = head.draft(hidden_BTH, tokens_BTH, positions_BT + s - 1, attend, earlier)
            drafted.append(head.logits(hidden_BTH))
    return drafted


def _positions(starts_BT: Tensor) -> Tensor:
    return torch.arange(starts_BT.shape[1], device=starts_BT.device) - starts_BT


def _ahead(x_BT: Tensor, s: int) -> Tensor:
    """Those of position p + s at p, and zeros at the end."""
    x = x_BT[:, s:]
    return pad(x, (0, s)) if x.dim() == 2 else pad(x, (0, 0, 0, s))


def _attention(starts_BT: Tensor) -> Attend:
    if starts_BT.is_cuda:
        return of_documents(starts_BT)
    index = torch.arange(starts_BT.shape[1])
    seen_BTT = (index <= index[:, None]) & (index >= starts_BT[..., None])

    def attend(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        repeats = q_BNTD.shape[1] // k_BGTD.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k_BGTD, v_BGTD))
        scores = (q_BNTD @ k.mT) * q_BNTD.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen_BTT[:, None], -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    return attend


if __name__ == "__main__":
    main()
