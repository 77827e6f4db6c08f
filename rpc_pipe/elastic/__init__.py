"""Jobs that go on without workers that die, take newcomers, and change their shape (`rpc-pipe run --elastic`)."""
