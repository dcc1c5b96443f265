"""How cells are executed: launch, workers, pools of them, progress and estimates."""
