// All functions that a kernel calls while it runs: by name, or because the compiler has put a call in front of an access.
// The events of observed thread blocks are counted here as well, because this part of the runtime is compiled for speed.
#include "calls.h"
#include "collectives.h"
#include "numbered_barriers.h"
#include "products.h"
#include "requests.h"
