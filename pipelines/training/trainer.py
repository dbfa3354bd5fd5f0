"""What both trainers share: their optimiser, arguments, resuming, and the final model."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list, reduce  # type: ignore[import-untyped]
from torch import nn
from transformers import PrinterCallback, TrainerCallback

from pipelines.core.errors import RecipeError, StoppedError, TrainingError
from pipelines.core.processes import on_sigterm
from pipelines.core.registry import OPTIMIZERS
from pipelines.rollout.model_loading import load
from pipelines.rollout.policies.factories import device
from pipelines.training.fused_head import patch_trl_lm_head
from pipelines.training.hardware import deepspeed_file
from pipelines.training.model import whole_weights
from pipelines.training.muon import MuonAdamW
from pipelines.training.plan import ADAPTER, CHECKPOINTS, MODEL, STOP, Plan
from pipelines.training.record import WHOLE, CurveRecorder, last_whole_checkpoint


class Preemption(TrainerCallback):  # type: ignore[misc]
    """Stops at the end of a step once any process was sent SIGTERM, or the run's folder has a file `stop`.

    A machine that is taken away so ends its step, writes a checkpoint and leaves. All processes stop after the same
    step, whichever of them was asked.

    Args:
        every: steps on one generation: a checkpoint between two of them would lose its rollouts.
    """

    def __init__(self, out: Path, every: int) -> None:
        self._file = out / STOP
        self._every = every
        self._is_asked = False
        self.step: int | None = None  # the step after which the run was stopped before its end

    def ask(self) -> None:
        """Let the run stop after the step that it is in."""
        self._is_asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Agree whether to stop here."""
        if state.global_step % self._every or state.global_step >= state.max_steps:
            return
        is_asked = self._is_asked
        if state.is_world_process_zero and self._file.exists():
            is_asked = True
        own_vote = torch.tensor(float(is_asked), device=PartialState().device)
        if reduce(own_vote):
            self.step = state.global_step
            control.should_save = True
            control.should_training_stop = True


class TrainerMixin:
    """Changes of both trainers to TRL's."""

    plan: Plan
    model: Any
    accelerator: Any
    is_deepspeed_enabled: bool
    aux_loss_enabled: bool  # whether the model balances its experts by a loss

    def create_optimizer(self, model: Any = None) -> Any:
        """The recipe's optimiser; if its maker returns None, transformers makes one from the arguments."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            settings = self.plan.optimizer
            network = model
            if model is None:
                network = self.model
            self.optimizer = OPTIMIZERS[settings.kind].make(network, settings, **settings.options)
        return super().create_optimizer(model)  # type: ignore[misc]

    def in_parts(self, model: Any, parts: Sequence[Any], compute: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch whose parts' losses add up to it: all parts but the last have their backward here.

        Args:
            compute: the loss of one part.
        """
        unscaled = {}
        if self.is_deepspeed_enabled:
            # TRL's loss is divided by the micro-batches of a step already; DeepSpeed would do it once more.
            unscaled["scale_wrt_gas"] = False
        before: float | torch.Tensor = 0.0
        for part in parts[:-1]:
            with unsynchronised(self.accelerator, model):
                loss = compute(part)
                self.accelerator.backward(loss, **unscaled)
            before = before + loss.detach()
        return compute(parts[-1]) + before

    def require_no_balancing(self, max_tokens: int | None) -> None:
        """Refuse to cut the micro-batches of a model of experts: its balancing loss is one of a whole micro-batch.

        Args:
            max_tokens: of a part; None if they are not cut.

        Raises:
            RecipeError: they would be.
        """
        if max_tokens is not None and self.aux_loss_enabled:
            raise RecipeError(
                "hardware.micro_tokens cuts micro-batches, and this model balances its experts over whole ones",
                "Set hardware.micro_tokens=null, and lower the stage's micro_batch if memory is full.",
            )

    def max_over_ranks(self, count: int) -> int:
        """The largest of the processes' counts."""
        if self.accelerator.num_processes == 1:
            return count
        own_count = torch.tensor([count], device=self.accelerator.device)
        counts: torch.Tensor = self.accelerator.gather(own_count)
        return int(counts.max())

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """TRL's, with the whole state of an optimiser that the processes share."""
        optimizer = getattr(self.optimizer, "optimizer", None)
        if isinstance(optimizer, MuonAdamW):
            optimizer.gather()
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


def keeps_small_updates(network: nn.Module) -> None:
    """Refuse to train weights that cannot hold an optimiser's small updates.

    An update of 1e-6 is below half of bfloat16's spacing at any weight over 3e-4: 98 % of the weights would never move.
    DeepSpeed makes its own float32 copies later, from these weights.
    """
    coarse = set()
    for weight in network.parameters():
        if weight.requires_grad:
            coarse.add(str(weight.dtype).removeprefix("torch."))
    if coarse - {"float32"}:
        raise RecipeError(
            f"weights under training are in {', '.join(sorted(coarse))}, which rounds small updates away",
            "Keep them in float32: model.compute_dtype says what products are computed in.",
        )


def common(plan: Plan, steps: int, save_steps: int) -> dict[str, Any]:
    """Arguments of TRL's configurations that SFT and GRPO share."""
    is_cpu = device(plan.recipe, 0) == "cpu"
    optimizer = plan.optimizer
    schedule: str = optimizer.schedule
    if schedule == "constant":
        schedule = "constant_with_warmup"
    return {
        "learning_rate": optimizer.lr,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.clip,
        "lr_scheduler_type": schedule,
        "optim": "adamw_torch_fused",  # unless the recipe's optimiser is made before, as Muon is
        "output_dir": str(plan.out / CHECKPOINTS),
        "max_steps": steps,
        "warmup_steps": int(steps * optimizer.warmup_ratio),
        "seed": plan.recipe.seed,
        "use_cpu": is_cpu,
        "bf16": plan.recipe.model.compute_dtype == "bfloat16",
        "activation_checkpointing": not is_cpu,
        "dataloader_pin_memory": not is_cpu,
        "deepspeed": deepspeed_file(plan.recipe.hardware.deepspeed, plan.optimizer.kind),
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": 2,
        "ddp_broadcast_buffers": False,  # buffers are the same from the start
        "ddp_timeout": plan.recipe.hardware.timeout_s,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def run(trainer: Any, plan: Plan) -> None:
    """Train, from the last whole checkpoint if there is one, then write the final model."""
    if _has_quantized_base(plan):
        for weight in trainer.model.parameters():  # TRL rounds the adapters of a quantized base to bfloat16
            if weight.requires_grad:
                weight.data = weight.data.float()
    keeps_small_updates(trainer.model)
    patch_trl_lm_head()
    trainer.remove_callback(PrinterCallback)
    stops_every = 1
    if plan.kind == "grpo":
        stops_every = plan.recipe.grpo.updates_per_rollout
    stop = Preemption(plan.out, stops_every)
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
    _write_model(trainer, plan)


def _has_quantized_base(plan: Plan) -> bool:
    """Whether adapters are trained on a base of few bits."""
    lora = plan.recipe.model.lora
    return lora is not None and lora.bits is not None


def _write_model(trainer: Any, plan: Plan) -> None:
    """Write the final model as a plain checkpoint folder that any engine loads: adapters are merged into their base."""
    out = plan.out
    has_adapters = plan.recipe.model.lora is not None
    partial = out / f"{MODEL}.partial"
    saved = partial
    if has_adapters:
        saved = out / ADAPTER
    trainer.save_model(str(saved))
    if not is_main():
        return
    (saved / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
    if _has_quantized_base(plan):  # merged into the base that they were trained on
        network, weights = whole_weights(trainer)
        network.save_pretrained(partial, state_dict=weights)
    elif has_adapters:
        from peft import PeftModel

        base, _ = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
        adapted = PeftModel.from_pretrained(base, str(saved))
        adapted.merge_and_unload().save_pretrained(partial)
    if has_adapters:
        trainer.processing_class.save_pretrained(partial)
    if (out / MODEL).exists():
        shutil.rmtree(out / MODEL)
    partial.rename(out / MODEL)


def resume_point(plan: Plan) -> str | None:
    """The checkpoint that every process goes on from: the first one chooses and clears up, the others wait for it.

    The data of a step do not depend on the number of processes, so it may be another one than before. (The draws of
    `grpo.resample` do: each process chooses for itself.)
    """
    plan_json = plan.model_dump_json()
    checkpoint = None
    if is_main():
        checkpoint = last_whole_checkpoint(plan.out)
    sent = [(plan_json, checkpoint)]
    broadcast_object_list(sent)
    first_plan, checkpoint = sent[0]
    if first_plan != plan_json:
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
