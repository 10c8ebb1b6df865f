"""Where factories make tensors."""

from recollect._torch.devices import default_device_type


def test_factories_make_tensors_on_the_cpu():
    assert default_device_type() == "cpu"
