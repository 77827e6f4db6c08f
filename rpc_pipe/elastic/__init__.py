"""Jobs that continue without workers that die, take newcomers, and change their shape (`rpc-pipe run --elastic`)."""
