"""What both trainers share: arguments, resume, the final model."""

import json
import os
import shutil
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import broadcast_object_list, gather_object  # type: ignore[import-untyped]
from torch import nn
from transformers import TrainerCallback

from pipelines.core.errors import RecipeError, StoppedError, TrainingError
from pipelines.core.processes import on_sigterm
from pipelines.core.registry import OPTIMIZERS
from pipelines.recipe.recipes import CONF
from pipelines.rollout.model_loading import load
from pipelines.training import optim
from pipelines.training.plan import ADAPTER, CHECKPOINTS, MODEL, STOP, Plan
from pipelines.training.record import WHOLE, CurveRecorder, last_whole_checkpoint
from pipelines.training.weights import whole_weights

# A machine that is taken away: a run that is asked to stop ends its step, writes a checkpoint and leaves.


class Preemption(TrainerCallback):  # type: ignore[misc]
    """Stops at the end of a step once any process was sent SIGTERM, or the run's folder has a file `stop`.

    All processes stop after the same step, whichever of them was asked.

    Args:
        out: the run's folder.
        every: steps on one generation: a checkpoint between two of them would lose its rollouts.
    """

    def __init__(self, out: Path, every: int) -> None:
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
        if any(gather_object([is_asked])) if PartialState().num_processes > 1 else is_asked:
            self.step = state.global_step
            control.should_save = control.should_training_stop = True


COARSE_MASTERS = "bf16_master_weights_and_grads"  # DeepSpeed's name for a run without float32 weights


class TrainerMixin:
    """What both trainers change in TRL's, or leave out of it: see each method."""

    plan: Plan
    model: Any

    def create_optimizer(self, model: Any = None) -> Any:
        """The recipe's optimiser; what its maker leaves to transformers is made as the arguments say."""
        optimizer: Any = getattr(self, "optimizer", None)
        if optimizer is None:
            settings = self.plan.optimizer
            network = self.model if model is None else model
            self.optimizer = OPTIMIZERS[settings.kind].make(network, settings, **settings.options)
        return super().create_optimizer(model)  # type: ignore[misc]

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """None: a stage's manifest says what made a model."""

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: walking over all parameters at each step costs a tiny model 2 % of it."""
        return 0


def world_size() -> int:
    """Processes that train together (torchrun sets it)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process writes the files."""
    return int(os.environ.get("RANK", "0")) == 0


def on_cpu(plan: Plan) -> bool:
    """Whether this run trains on the CPU."""
    device = plan.recipe.hardware.device
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def join_processes(plan: Plan) -> None:
    """On a CPU, open the process group by hand: transformers gives it no time-out, and DeepSpeed looks for MPI."""
    patience = timedelta(seconds=plan.recipe.hardware.timeout_s)
    if not on_cpu(plan) or world_size() == 1:
        return
    if plan.recipe.hardware.deepspeed:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, timeout=patience)
    else:
        torch.distributed.init_process_group("gloo", timeout=patience)


def lean_head() -> None:
    """Let TRL's fused LM head on the CPU skip unlabelled positions, as it does on CUDA, and compute in small tiles.

    TRL scores every position where Triton is absent, to keep shapes fixed for compilers, and in tiles larger than a
    cache. The numbers are the same.
    """
    from trl.trainer import utils

    from pipelines.training.packing import Head

    on_device = utils._use_triton

    def compact(device: torch.device) -> bool:
        return device.type == "cpu" or bool(on_device(device))

    utils._use_triton = compact
    utils._ChunkedLogProbFunction = Head


def deepspeed_file(plan: Plan) -> str | None:
    """DeepSpeed's configuration: a file of one's own, or one of `infra/deepspeed/` by name ("zero2", "zero3")."""
    name = plan.recipe.hardware.deepspeed
    if name is None:
        return None
    kind = plan.optimizer.kind
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
    """Refuse to train weights that cannot hold what the optimiser adds to them.

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
    cpu = on_cpu(plan)
    return {
        **optim.arguments(plan.optimizer),
        "output_dir": str(plan.out / CHECKPOINTS),
        "max_steps": steps,
        "warmup_steps": int(steps * plan.optimizer.warmup_ratio),
        "seed": plan.recipe.seed,
        "use_cpu": cpu,
        "bf16": plan.recipe.model.compute_dtype == "bfloat16",
        "activation_checkpointing": not cpu,
        "dataloader_pin_memory": not cpu,
        "deepspeed": deepspeed_file(plan),
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": 2,
        "ddp_timeout": plan.recipe.hardware.timeout_s,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "disable_tqdm": True,
    }


def run(trainer: Any, plan: Plan) -> None:
    """Train, from the last whole checkpoint when there is one, then write the final model."""
    from transformers import PrinterCallback

    if plan.recipe.model.lora is not None and plan.recipe.model.lora.bits is not None:
        for weight in trainer.model.parameters():  # TRL rounds the adapters of a quantized base to bfloat16
            weight.data = weight.data.float() if weight.requires_grad else weight.data
    keeps_small_updates(trainer.model)
    lean_head()
    trainer.remove_callback(PrinterCallback)
    stop = Preemption(plan.out, plan.recipe.grpo.updates_per_rollout if plan.kind == "grpo" else 1)
    recorder = trainer.pop_callback(
        CurveRecorder
    )  # it looks for room before each checkpoint, also before that of a stop
    recorder.measure(trainer.model)
    for callback in (stop, recorder):
        trainer.add_callback(callback)
    with warnings.catch_warnings(), on_sigterm(stop.ask):
        # TRL 1.16 still reads the name that transformers 5.23 has renamed.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        trainer.train(resume_from_checkpoint=resume_point(plan))
    if stop.step is not None:
        raise StoppedError(
            f"training was asked to stop, and did so after step {stop.step}", "Run again: it goes on from there."
        )
    _save(trainer, plan)


def resume_point(plan: Plan) -> str | None:
    """The checkpoint that every process goes on from: the first one chooses and clears up, the others wait for it.

    The data of a step do not depend on the number of processes, so it may be another one than before. (What
    `grpo.resample` draws anew does: each process chooses for itself.)
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


def _save(trainer: Any, plan: Plan) -> None:
    """The final model as a plain checkpoint folder that any engine loads: adapters are merged into their base."""
    beside = plan.out / f"{MODEL}.partial"
    lora = plan.recipe.model.lora
    saved = plan.out / ADAPTER if lora is not None else beside
    trainer.save_model(str(saved))
    if not is_main():
        return
    (saved / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
    if lora is not None and lora.bits is not None:  # merged into the base that they were trained on
        network, weights = whole_weights(trainer)
        network.save_pretrained(beside, state_dict=weights)
        trainer.processing_class.save_pretrained(beside)
    elif lora is not None:
        _merge(plan, trainer.processing_class)
    if (plan.out / MODEL).exists():
        shutil.rmtree(plan.out / MODEL)
    beside.rename(plan.out / MODEL)


def _merge(plan: Plan, tokenizer: Any) -> None:
    from peft import PeftModel

    base, _ = load(plan.checkpoint_in, plan.recipe.model, torch.float32)
    merged = PeftModel.from_pretrained(base, str(plan.out / ADAPTER)).merge_and_unload()
    merged.save_pretrained(plan.out / f"{MODEL}.partial")
    tokenizer.save_pretrained(plan.out / f"{MODEL}.partial")
