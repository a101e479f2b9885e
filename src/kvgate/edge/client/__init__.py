"""The client half: coming back when told. The public name is `kvgate.client`."""
