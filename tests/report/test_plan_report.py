from recollect.report.plan_report import bands_of


def _names(paths, nbytes=None):
    names, bands = bands_of(paths, nbytes or [1] * len(paths))
    assert [bands[n] for n in range(len(paths))] == bands
    return {path: names[band] for path, band in zip(paths, bands, strict=True)}


def test_layers_are_bands_however_deep_they_are():
    layers = [f"model.layers.{n}.{part}" for n in range(6) for part in ("attn", "mlp")]
    found = _names(["model.embed", *layers, "head", ""])
    assert found["model.layers.3.attn"] == found["model.layers.3.mlp"] == "model.layers.3"
    assert found["model.embed"] == "model.embed"
    assert found["head"] == "head"
    assert found[""] == "the model itself"


def test_many_layers_are_put_together_in_runs():
    found = _names(["embed", *(f"layers.{n}.mlp" for n in range(40)), "head"])
    assert len(set(found.values())) <= 16
    assert found["layers.0.mlp"] == found["layers.2.mlp"] == "layers.0-2"
    assert found["layers.39.mlp"] == "layers.39"


def test_a_model_without_layers_is_divided_by_what_is_largest():
    found = _names(["down.conv", "down.norm", "up.conv"], [8, 8, 1])
    assert len(set(found.values())) == 3


def test_the_only_layer_is_divided():
    assert set(_names(["blocks.0.attn", "blocks.0.mlp"]).values()) == {
        "blocks.0.attn",
        "blocks.0.mlp",
    }
    assert set(_names(["0.attn", "0.mlp", "1.attn", "1.mlp"]).values()) == {"0", "1"}


def test_a_model_of_one_op_is_one_band():
    assert _names([""]) == {"": "the model itself"}
