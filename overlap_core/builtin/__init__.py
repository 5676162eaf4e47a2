"""Default behaviour, as plugins that go through the same host as anybody else's."""
