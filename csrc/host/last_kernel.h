// What this thread's last operator call ran, for tests, benchmarks and diagnosis.
#pragma once

namespace flashmoe::host {

// A kernel's symbol; for a list of kernels, that of the one that does the work. "" if a call runs none.
void set_last_kernel(const char* symbol);

// A call on the CPU: "cpu:<isa>", formatted only when it is read.
void set_last_isa(const char* name);

const char* last_kernel();

}  // namespace flashmoe::host
