"""What the handle of an offloaded model shows: what users call, and nothing else."""

from infinity import OffloadedModel

CALLED_BY_USERS = {
    *("backward", "clip_grad_norm_", "export", "flush", "gathered", "grad_norm", "gradient"),
    *("load", "loss_scale", "model", "optimizer", "report", "save", "step", "trace"),
    *("snapshot", "snapshots", "restore", "drop_snapshot"),
}


def test_the_handle_shows_only_what_users_call() -> None:
    shown = {name for name in vars(OffloadedModel) if not name.startswith("_")}
    assert shown == CALLED_BY_USERS
