"""What is written about results: an ablation's tables and page, a checkpoint's heads."""
