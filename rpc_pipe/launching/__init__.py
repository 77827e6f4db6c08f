"""Worker processes: how they are started, how they meet, and how they talk to their launcher."""
