"""Everything that only a GPU can prove, in parts of minutes: `hundredfold bench gpu`."""
