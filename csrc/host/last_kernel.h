// What this thread's last operator call ran, for tests, benchmarks and whoever wonders.
#pragma once

namespace flashmoe::host {

// A kernel's symbol; of a list of kernels the one that does the work. "" when a call runs none.
void set_last_kernel(const char* symbol);

// A call on the CPU: "cpu:<isa>", made into text when somebody asks.
void set_last_isa(const char* name);

const char* last_kernel();

}  // namespace flashmoe::host
