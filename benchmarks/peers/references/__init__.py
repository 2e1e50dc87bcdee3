"""The same PPO in other libraries. Each script runs in a virtual environment of its own."""
