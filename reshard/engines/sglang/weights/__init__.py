"""What a rank of SGLang holds, and where: from SGLang's layouts and names, held against the trace of its loader."""
