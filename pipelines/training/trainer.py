"""What both trainers share: their optimiser, arguments, resuming, and the final model."""

import json
import os
import shutil
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list, reduce  # type: ignore[import-untyped]
from torch import distributed, nn
from transformers import PrinterCallback, TrainerCallback

from pipelines.core.errors import RecipeError, StoppedError, TrainingError
from pipelines.core.processes import on_sigterm
from pipelines.core.registry import OPTIMIZERS
from pipelines.recipe.config import Optimizer
from pipelines.recipe.recipes import CONF
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies.factories import device
from pipelines.training.model import whole_weights
from pipelines.training.plan import ADAPTER, CHECKPOINTS, MODEL, STOP, Plan
from pipelines.training.record import WHOLE, CurveRecorder, last_whole_checkpoint

COARSE_MASTERS = "bf16_master_weights_and_grads"  # DeepSpeed's name for a run without float32 weights


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al., 2024) for hidden matrices, `torch.optim.AdamW` for embeddings and norms.

    Parameter groups and state belong to this optimiser, so that schedulers, `state_dict` and `load_state_dict` see one.
    Processes that train together have the same gradients, and Muon's products take long: each steps its own share of
    the matrices, those of one shape together, and sends the others the result, bit for bit. The others have the
    momentum of its share after `gather` only.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        rest: Iterable[nn.Parameter],
        optimizer: Optimizer,
        lr_rest: float | None = None,
    ) -> None:
        muon = torch.optim.Muon(list(matrices), lr=optimizer.lr, weight_decay=optimizer.weight_decay)
        self._adamw = torch.optim.AdamW(
            list(rest),
            lr=optimizer.lr if lr_rest is None else lr_rest,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        super().__init__([*muon.param_groups, *self._adamw.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None if closure is None else closure()
        muon, *rest = self.param_groups
        self._adamw.param_groups, self._adamw.state = rest, self.state
        self._adamw.step()
        is_shared = distributed.is_available() and distributed.is_initialized()
        rank, ranks = (distributed.get_rank(), distributed.get_world_size()) if is_shared else (0, 1)
        self._of_ranks = shares(muon["params"], ranks)
        alike = defaultdict(list)
        for parameter in self._of_ranks[rank]:
            if parameter.grad is not None:
                alike[parameter.shape, parameter.dtype].append(parameter)
        for (shape, _), parameters in alike.items():
            updates = []
            for parameter in parameters:
                assert parameter.grad is not None
                buffer = self._momentum(parameter).lerp_(parameter.grad, 1 - muon["momentum"])
                updates.append(parameter.grad.lerp(buffer, muon["momentum"]))
            rounds, coefficients = slow_bfloat16(updates[0].device), muon["ns_coefficients"]
            products = orthogonal(torch.stack(updates), coefficients, muon["ns_steps"], muon["eps"], rounds)
            for parameter, product in zip(parameters, products, strict=True):
                parameter.mul_(1 - muon["lr"] * muon["weight_decay"])
                parameter.add_(product, alpha=-muon["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5)
        for owner, parameters in enumerate(self._of_ranks if ranks > 1 else ()):
            send([parameter.data for parameter in parameters], owner)
        return loss

    def gather(self) -> None:
        """Give every process the momentum of all matrices, as a checkpoint has it."""
        for owner, parameters in enumerate(self._of_ranks if len(self._of_ranks) > 1 else ()):
            send([self._momentum(parameter) for parameter in parameters], owner)

    def _momentum(self, parameter: nn.Parameter) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter.data)
        return state["momentum_buffer"]


def send(tensors: Sequence[torch.Tensor], owner: int) -> None:
    """Give every process the tensors as their owner has them."""
    if not tensors:
        return
    whole = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])
    distributed.broadcast(whole, owner)
    parts = torch.split(whole, [tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True) if owner != distributed.get_rank() else ():
        tensor.copy_(part.clone().view(tensor.dtype).reshape(tensor.shape))  # a copy is aligned


def slow_bfloat16(device: torch.device) -> bool:
    """Whether this is a CPU without instructions for bfloat16: PyTorch 2.13 then multiplies number by number."""
    has_mkldnn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and not (has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def orthogonal(
    updates: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float, rounds: bool
) -> torch.Tensor:
    """Newton-Schulz iterations of `torch.optim.Muon` on matrices (M, R, C) at once: the same bits in less time.

    With `rounds`, products are taken in float32 and rounded to bfloat16, as a CPU with instructions for it does.
    """

    def cut(product: torch.Tensor) -> torch.Tensor:
        return product.bfloat16().float() if rounds else product.bfloat16()

    tall, (a, b, c) = updates.size(1) > updates.size(2), coefficients
    x = updates.bfloat16()
    x = cut(x / torch.stack([matrix.norm().clamp(min=eps) for matrix in x])[:, None, None])
    x = x.mT if tall else x
    for _ in range(steps):
        gram = cut(x @ x.mT)
        x = cut(torch.baddbmm(x, cut(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x.mT if tall else x


def shares(matrices: Sequence[nn.Parameter], ranks: int) -> list[list[nn.Parameter]]:
    """The matrices of each process: the most costly first, each to the process that has the least to multiply so far.

    The cost of a matrix is that of its product with itself, (shorter side)^2 x longer side.
    """
    cost = [min(matrix.shape) ** 2 * max(matrix.shape) for matrix in matrices]
    load = [0] * ranks
    of_ranks: list[list[nn.Parameter]] = [[] for _ in range(ranks)]
    for at in sorted(range(len(matrices)), key=lambda at: -cost[at]):
        rank = load.index(min(load))
        load[rank] += cost[at]
        of_ranks[rank].append(matrices[at])
    return of_ranks


def split(network: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters as (matrices of the blocks, embeddings, heads, norms and biases)."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
    return matrices, rest


class Preemption(TrainerCallback):  # type: ignore[misc]
    """Stops at the end of a step once any process was sent SIGTERM, or the run's folder has a file `stop`.

    A machine that is taken away so ends its step, writes a checkpoint and leaves. All processes stop after the same
    step, whichever of them was asked.
    """

    def __init__(self, out: Path, every: int) -> None:
        # `every`: steps on one generation: a checkpoint between two of them would lose its rollouts.
        self._file, self._every = out / STOP, every
        self._is_asked = False
        self.step: int | None = None  # after which the run was stopped before its end

    def ask(self) -> None:
        """Let the run stop after the step that it is in."""
        self._is_asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree whether to stop here."""
        if state.global_step % self._every or state.global_step >= state.max_steps:
            return
        is_asked = self._is_asked or (state.is_world_process_zero and self._file.exists())
        if reduce(torch.tensor(float(is_asked), device=PartialState().device)):
            self.step = state.global_step
            control.should_save = control.should_training_stop = True


class TrainerMixin:
    """Changes of both trainers to TRL's."""

    plan: Plan
    model: Any
    accelerator: Any
    is_deepspeed_enabled: bool

    def create_optimizer(self, model: Any = None) -> Any:
        """The recipe's optimiser; one whose maker returns None is made by transformers from the arguments."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            settings = self.plan.optimizer
            network = self.model if model is None else model
            self.optimizer = OPTIMIZERS[settings.kind].make(network, settings, **settings.options)
        return super().create_optimizer(model)  # type: ignore[misc]

    def in_parts(self, model: Any, parts: Sequence[Any], compute: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch whose parts' losses add up to it: all parts but the last have their backward here.

        Args:
            compute: the loss of one part.
        """
        # TRL's loss is divided by the micro-batches of a step already; DeepSpeed would do it once more.
        unscaled = {"scale_wrt_gas": False} if self.is_deepspeed_enabled else {}
        before: float | torch.Tensor = 0.0
        for part in parts[:-1]:
            with unsynchronised(self.accelerator, model):
                loss = compute(part)
                self.accelerator.backward(loss, **unscaled)
            before = before + loss.detach()
        return compute(parts[-1]) + before

    def most(self, count: int) -> int:
        """The largest of the processes' counts."""
        if self.accelerator.num_processes == 1:
            return count
        counts: torch.Tensor = self.accelerator.gather(torch.tensor([count], device=self.accelerator.device))
        return int(counts.max())

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, with the whole state of an optimiser that the processes share."""
        if isinstance(own := getattr(self.optimizer, "optimizer", None), MuonAdamW):
            own.gather()
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """Write none: a stage's manifest says how a model was made."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: walking over all parameters at each step costs a tiny model 2 % of it."""
        return 0


@contextmanager
def unsynchronised(accelerator: Any, model: Any) -> Iterator[None]:
    """Inside, backwards add up gradients on each process by itself: the last one outside brings them together."""
    state = accelerator.gradient_state
    before = state.sync_gradients
    with accelerator.no_sync(model):
        state._set_sync_gradients(False)
        try:
            yield
        finally:
            state._set_sync_gradients(before)


def world_size() -> int:
    """Processes that train together (torchrun sets it)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process writes the files."""
    return int(os.environ.get("RANK", "0")) == 0


def lean_head() -> None:
    """Let TRL's fused LM head on the CPU skip unlabelled positions, as it does on CUDA, and compute in small tiles.

    TRL scores every position if Triton is absent, to keep shapes fixed for compilers, and in tiles larger than a
    cache. The numbers are the same.
    """
    from trl.trainer import utils

    from pipelines.training.packing import Head

    on_device = utils._use_triton
    utils._use_triton = lambda device: device.type == "cpu" or bool(on_device(device))
    utils._ChunkedLogProbFunction = Head


def deepspeed_file(plan: Plan) -> str | None:
    """DeepSpeed's configuration: a file of one's own, or one of `infra/deepspeed/` by name ("zero2", "zero3")."""
    name, kind = plan.recipe.hardware.deepspeed, plan.optimizer.kind
    if name is None:
        return None
    if OPTIMIZERS[kind].whole_matrices:
        raise RecipeError(f"{kind} needs whole matrices, and DeepSpeed cuts them up", "Set optimizer.kind=adamw.")
    ours = CONF.parent / "infra" / "deepspeed" / f"{name}.json"
    path = ours if ours.is_file() else Path(name)
    if not path.is_file():
        names = ", ".join(sorted(file.stem for file in ours.parent.glob("*.json")))
        raise RecipeError(f"hardware.deepspeed: no such file {name}", f"Give a JSON file or one of: {names}.")
    if json.loads(path.read_text(encoding="utf-8")).get("bf16", {}).get(COARSE_MASTERS):
        raise RecipeError(f"{path}: {COARSE_MASTERS} rounds small updates away", "Let ZeRO keep its float32 weights.")
    return str(path)


def keeps_small_updates(network: nn.Module) -> None:
    """Refuse to train weights that cannot hold an optimiser's small updates.

    An update of 1e-6 is below half of bfloat16's spacing at any weight over 3e-4: 98 % of the weights would never move.
    DeepSpeed makes its own float32 copies later, from these weights.
    """
    coarse = {str(weight.dtype).removeprefix("torch.") for weight in network.parameters() if weight.requires_grad}
    if coarse - {"float32"}:
        raise RecipeError(
            f"weights under training are in {', '.join(sorted(coarse))}, which rounds small updates away",
            "Keep them in float32: model.compute_dtype says what products are computed in.",
        )


def common(plan: Plan, steps: int, save_steps: int) -> dict[str, Any]:
    """Arguments of TRL's configurations that SFT and GRPO share."""
    cpu, optimizer = device(plan.recipe, 0) == "cpu", plan.optimizer
    return {
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip,
        "lr_scheduler_type": "constant_with_warmup" if optimizer.schedule == "constant" else optimizer.schedule,
        "optim": "adamw_torch_fused",  # unless the recipe's optimiser is made before, as Muon is
        "output_dir": str(plan.out / CHECKPOINTS),
        "max_steps": steps,
        "warmup_steps": int(steps * optimizer.warmup_ratio),
        "seed": plan.recipe.seed,
        "use_cpu": cpu,
        "bf16": plan.recipe.model.compute_dtype == "bfloat16",
        "activation_checkpointing": not cpu,
        "dataloader_pin_memory": not cpu,
        "deepspeed": deepspeed_file(plan),
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": 2,
        "ddp_broadcast_buffers": False,  # they are the same from the start
        "ddp_timeout": plan.recipe.hardware.timeout_s,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def run(trainer: Any, plan: Plan) -> None:
    """Train, from the last whole checkpoint if there is one, then write the final model."""
    out, lora = plan.out, plan.recipe.model.lora
    is_quantized = lora is not None and lora.bits is not None
    if is_quantized:
        for weight in trainer.model.parameters():  # TRL rounds the adapters of a quantized base to bfloat16
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    keeps_small_updates(trainer.model)
    lean_head()
    trainer.remove_callback(PrinterCallback)
    stop = Preemption(out, plan.recipe.grpo.updates_per_rollout if plan.kind == "grpo" else 1)
    # The recorder comes last: it looks for room before each checkpoint, also before that of a stop.
    recorder = trainer.pop_callback(CurveRecorder)
    recorder.measure(trainer.model)
    for callback in (stop, recorder):
        trainer.add_callback(callback)
    with warnings.catch_warnings(), on_sigterm(stop.ask):
        # TRL 1.16 still uses the names that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing", category=FutureWarning)
        trainer.train(resume_from_checkpoint=resume_point(plan))
    if stop.step is not None:
        problem = f"training was asked to stop, and did so after step {stop.step}"
        raise StoppedError(problem, "Run again: it goes on from there.")

    # The final model is a plain checkpoint folder that any engine loads: adapters are merged into their base.
    partial = out / f"{MODEL}.partial"
    saved = out / ADAPTER if lora is not None else partial
    trainer.save_model(str(saved))
    if not is_main():
        return
    (saved / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
    if is_quantized:  # merged into the base that they were trained on
        network, weights = whole_weights(trainer)
        network.save_pretrained(partial, state_dict=weights)
    elif lora is not None:
        from peft import PeftModel

        base, _ = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
        PeftModel.from_pretrained(base, str(saved)).merge_and_unload().save_pretrained(partial)
    if lora is not None:
        trainer.processing_class.save_pretrained(partial)
    if (out / MODEL).exists():
        shutil.rmtree(out / MODEL)
    partial.rename(out / MODEL)


def resume_point(plan: Plan) -> str | None:
    """The checkpoint that every process goes on from: the first one chooses and clears up, the others wait for it.

    The data of a step do not depend on the number of processes, so it may be another one than before. (The draws of
    `grpo.resample` do: each process chooses for itself.)
    """
    own = plan.model_dump_json()
    sent = [(own, last_whole_checkpoint(plan.out) if is_main() else None)]
    broadcast_object_list(sent)
    (first, checkpoint) = sent[0]
    if first != own:
        raise TrainingError(
            f"this machine has joined another training, {plan.out}, than the first one",
            "It joined what a killed run has left. Run again: it joins the newest one.",
        )
    if checkpoint is not None and plan.recipe.hardware.deepspeed is not None:
        before = int(Path(checkpoint, WHOLE).read_text(encoding="utf-8"))
        if before != world_size():
            raise TrainingError(
                f"the checkpoint was written by {before} processes, and DeepSpeed goes on with as many only",
                f"Start {before} processes again, or remove {plan.out / CHECKPOINTS} to begin anew.",
            )
    return checkpoint
