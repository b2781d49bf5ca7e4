"""The GPU benchmark `hundredfold bench gpu`: measurements that need a GPU, in parts of minutes."""
