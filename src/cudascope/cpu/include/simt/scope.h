// The threads among which a barrier or an atomic works.
#pragma once

namespace cuda {
enum thread_scope { thread_scope_system, thread_scope_device, thread_scope_block, thread_scope_thread };
}
